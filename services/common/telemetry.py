"""Logs: one line per event on standard error, with the name of the service in front."""

import logging


def configure_logging(service: str, level: str = "INFO") -> None:
    """Sets up the root logger of a service process."""
    logging.basicConfig(
        level=level,
        format=f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s",
        force=True,
    )
    for noisy in ("grpc", "asyncio", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
