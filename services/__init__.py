"""The services of Orcinus. `python -m services.X` runs the service `services.X`; services
communicate only by the messages of `protos/`.

The variable GRPC_VERBOSITY is set here, before gRPC is imported: otherwise gRPC would write a line
to standard error for each connection that a peer closes. Important failures are raised as errors.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
