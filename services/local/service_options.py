"""The options with which the services of a local system start."""

import os
from collections.abc import Sequence
from pathlib import Path

from services.common.address import Address
from services.common.by_model import value_for
from services.common.cpus import usable_cpus
from services.local.child import STOP_TIMEOUT_S
from services.local.settings import LocalSettings

DRAIN_S = 5
"""Seconds that running requests have to finish when the scheduler is stopped.

The value is below the timeout after which `Child.stop` kills a service. For the frontend, that
timeout itself is used.
"""


def free_address(host: str) -> str:
    """Returns the address of port 0 of `host`, as host:port. A service that listens at port 0 gets
    a free port from the operating system."""
    return str(Address(host, 0))


def of_worker(
    settings: LocalSettings, index: int, *, host: str, kv_directory: Path | None
) -> dict[str, object]:
    """Returns the settings of a worker, keyed by option of its command line.

    `index` counts the workers of all models. The workers of a model have consecutive numbers. The
    worker listens on `host`, and keeps keys and values in files in `kv_directory` if it is given.
    """
    model, number = divmod(index, settings.n_workers_each)
    n_threads, cpus = share_cpus(settings, usable_cpus(), sorted(os.sched_getaffinity(0)))
    name, path = settings.model[model]
    return {
        "model": path,
        "adapters": ",".join(f"{name}={path.absolute()}" for name, path in settings.adapters)
        or None,
        "allowed-adapter-sources": ",".join(settings.allowed_adapter_sources) or None,
        "max-loaded-adapters": settings.max_loaded_adapters,
        "pooling": value_for(name, settings.pooling) or None,
        "address": free_address(host),
        "data-host": host,
        "stage-index": number if settings.has_fixed_stages else None,
        "n-stages": settings.stages if settings.has_fixed_stages else None,
        "tp-size": settings.tp,
        "load-format": settings.load_format,
        "dtype": settings.dtype,
        "quantization": settings.quantization,
        "weight-cache": settings.weight_cache_directory,
        "max-model-len": settings.max_model_len,
        "kv-memory": settings.kv_memory,
        "kv-directory": kv_directory,
        "transfer-timeout-s": settings.iteration_limit_s,
        "profile-dir": settings.profile_dir,
        "receipts": settings.receipts,
        "n-threads": n_threads,
        "cpus": ",".join(str(cpu) for cpu in cpus[index]) or None,
        **dict(settings.worker),
    }


def of_scheduler(
    settings: LocalSettings, workers: Sequence[str], *, host: str
) -> dict[str, object]:
    """Returns the settings of the scheduler of a model, keyed by option of its command line.

    `workers` are the addresses of the model's workers. If there is only one pipeline, they are
    ordered by the stages of the workers. The scheduler listens on `host`.
    """
    return {
        "address": free_address(host),
        "stages": ",".join(workers),
        "n-stages": settings.stages,
        "max-pipelines": settings.pipelines,
        "max-batch-size": settings.max_batch_size,
        "max-batch-tokens": settings.max_batch_tokens,
        "policy": settings.policy,
        "pipeline-depth": settings.pipeline_depth,
        "prefix-cache": settings.prefix_cache,
        "max-requests": settings.max_requests,
        "iteration-limit-s": settings.iteration_limit_s,
        "traced-iterations-per-s": settings.traced_iterations_per_s,
        "drain-s": DRAIN_S,
        **dict(settings.scheduler),
    }


def of_frontend(settings: LocalSettings, schedulers: Sequence[str]) -> dict[str, object]:
    """Returns the settings of the frontend, keyed by option of its command line.

    `schedulers` has the address of the scheduler of each model.
    """
    names = [name for name, _ in settings.model]
    # An absolute path is not mistaken for NAME=DIRECTORY.
    paths = [str(path.absolute()) for _, path in settings.model]
    return {
        "model": _by_model(names, paths),
        "served-model-name": ",".join(settings.served_model_name) or None,
        "scheduler": _by_model(names, schedulers),
        "http-address": str(Address(settings.host, settings.http_port)),
        "grpc-address": str(Address(settings.host, settings.grpc_port)),
        "api-keys-file": settings.api_keys_file,
        "receipts": settings.receipts,
        "receipt-keys-file": settings.receipt_keys_file,
        "share-ports": True if settings.n_frontends > 1 else None,
        "public-tls-dir": settings.tls_dir,
        "page": settings.page,
        "drain-s": STOP_TIMEOUT_S,
        # With `fail_fast` a lost pipeline does not come back, so requests do not wait for it.
        **({"hold-s": 0, "resume-s": 0} if settings.fail_fast else {}),
        **dict(settings.frontend),
    }


def share_cpus(
    settings: LocalSettings, n_usable: int, cpus: Sequence[int]
) -> tuple[int, list[list[int]]]:
    """Returns the number of compute threads of each rank, and for each worker a list of the CPUs to
    which its threads are bound.

    The lists are empty, and no thread is bound, unless the threads of all ranks need exactly all
    CPUs. The reason is that another system on this machine would choose the same CPUs. The ranks of
    spare workers are not counted. If a single worker uses all CPUs, its spares are bound to the
    same CPUs. Otherwise spares are not bound.

    `n_usable` is the number of CPUs whose time this process may use. A quota can make it smaller
    than the number of `cpus`.
    """
    n_computing = len(settings.model) * settings.n_computing_each
    n_threads = settings.threads or max(1, n_usable // (n_computing * settings.tp))
    per_worker = settings.tp * n_threads
    if not n_computing * per_worker == n_usable == len(cpus):
        return n_threads, [[]] * settings.n_workers
    shares = [list(cpus[first : first + per_worker]) for first in range(0, n_usable, per_worker)]
    of_spares = [shares[0] if n_computing == 1 else []] * settings.n_spares_each
    n_each = settings.n_computing_each
    by_model = (shares[first : first + n_each] for first in range(0, n_computing, n_each))
    return n_threads, [cpus for its in by_model for cpus in (*its, *of_spares)]


def _by_model(names: Sequence[str], values: Sequence[str]) -> str:
    """Returns the text of a setting that has a value for each model: `NAME=VALUE`, separated by
    commas. A model without a name has only the value. `names` and `values` have one entry per
    model."""
    pairs = zip(names, values, strict=True)
    return ",".join(f"{name}={value}" if name else value for name, value in pairs)
