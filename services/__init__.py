"""The processes of Orcinus. `services.X` is run as `python -m services.X`; they meet only in
protos.

gRPC's core tells on standard error of every connection that a peer closes, unless this is set
before it is first imported; what matters of that reaches us as an error.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
