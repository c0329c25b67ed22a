# The images of Orcinus; `make images` builds them all.
#
#   frontend, scheduler    without torch; frontend also has services.console and services.hub
#   worker                 with torch for DEVICE, cpu or cuda
#   demo-model             models/demo, and a command that copies it into a volume
#
# Dependencies lie in /venv, in layers that change only with them; our code lies in /app. All run as a
# user without rights, on a read-only root file system, and write to /tmp and volumes only. The base
# has no compiler, and of the images only the worker for CUDA has one, with which Triton compiles what
# launches its kernels; and no CUDA: torch's wheels bring their own. What is in an image lies in its
# /sbom.cdx.json.
#
# Packages come by version and hash from requirements/ (`make locks`), except torch where DEVICE is cpu
# or TORCH_INDEX is set: each index has builds, and so hashes, of its own.

# The digest is of the index for all processors, as it was in August 2026 (Python 3.11.16, Debian 13).
# checkov:skip=CKV_DOCKER_7:the tag of the base is in BASE
ARG BASE=python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7

# --- Building -------------------------------------------------------------------------------------

FROM ${BASE} AS build
WORKDIR /build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

FROM build AS protos
COPY requirements/protos.txt ./
RUN pip install --require-hashes -r protos.txt
COPY protos protos
RUN mkdir gen \
 && python -m grpc_tools.protoc -Iprotos --python_out=gen --grpc_python_out=gen protos/orcinus/v1/*.proto

# Byte code is not compared with its source again: both stay as they are.
FROM build AS code
COPY --from=protos /build/gen /app
COPY services/__init__.py /app/services/
COPY services/common /app/services/common

FROM code AS frontend-code
COPY services/grammar /app/services/grammar
COPY services/frontend /app/services/frontend
COPY services/console /app/services/console
COPY services/hub /app/services/hub
COPY services/receipts /app/services/receipts
RUN chmod -R a+rX /app && python -m compileall -q --invalidation-mode unchecked-hash /app

FROM code AS scheduler-code
COPY services/scheduler /app/services/scheduler
RUN chmod -R a+rX /app && python -m compileall -q --invalidation-mode unchecked-hash /app

# For every instruction set that a node may have; the one that fits is chosen where it runs.
FROM build AS native-kernels
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY kernels/build.py kernels/
COPY kernels/native/src kernels/native/src
RUN python kernels/build.py all

FROM code AS worker-code
COPY kernels /app/kernels
COPY --from=native-kernels /build/kernels/native/lib /app/kernels/native/lib
COPY services/grammar /app/services/grammar
COPY services/worker /app/services/worker
RUN chmod -R a+rX /app && python -m compileall -q --invalidation-mode unchecked-hash /app

FROM build AS model
COPY models/demo /model
RUN chmod -R a+rX /model

# --- Running --------------------------------------------------------------------------------------

# The virtual environments are made in place, since a layer that is copied has to be compared whole at
# every build.
FROM ${BASE} AS service
WORKDIR /app
ENV PATH=/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    ORCINUS_HEALTH_ADDRESS=[::]:50060
EXPOSE 50060
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python", "-m", "services.common.healthcheck", "localhost:50060", "readiness"]
# The base leaves out the byte code of Python's library. Without it, a frontend would start 0.6 s later.
RUN python -m compileall -q --invalidation-mode unchecked-hash -x '/(site-packages|tests?)/' \
    "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
RUN python -m venv --without-pip /venv
COPY LICENSE /venv/

FROM service AS frontend-venv
COPY requirements/frontend.txt /venv/requirements.txt
RUN pip --python /venv/bin/python install --no-cache-dir --require-hashes -r /venv/requirements.txt

FROM service AS scheduler-venv
COPY requirements/scheduler.txt /venv/requirements.txt
RUN pip --python /venv/bin/python install --no-cache-dir --require-hashes -r /venv/requirements.txt

# A wheel that cannot do what DEVICE says fails here and not in a pod.
FROM service AS worker-venv
ARG TORCH_INDEX=
ARG DEVICE=cpu
RUN if [ "$DEVICE" = cuda ]; then \
    apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
COPY constraints.txt requirements/worker-$DEVICE.txt /venv/
RUN if [ "$DEVICE" = cpu ] || [ -n "$TORCH_INDEX" ]; then \
    pip --python /venv/bin/python install --no-cache-dir -c /venv/constraints.txt \
    --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch; fi \
 && pip --python /venv/bin/python install --no-cache-dir --require-hashes -r "/venv/worker-$DEVICE.txt"
RUN python -c 'import sys, torch; \
sys.exit(sys.argv[1] == "cuda" and torch.version.cuda is None and "this torch has no CUDA")' "$DEVICE"

# --- Listing what is installed ----------------------------------------------------------------------

FROM build AS sbom
COPY requirements/sbom.txt ./
RUN python -m venv /sbom && pip --python /sbom/bin/python install --require-hashes -r sbom.txt

FROM frontend-venv AS frontend-sbom
COPY --from=sbom /sbom /sbom
RUN /sbom/bin/cyclonedx-py environment --output-reproducible -o /sbom.cdx.json /venv/bin/python

FROM scheduler-venv AS scheduler-sbom
COPY --from=sbom /sbom /sbom
RUN /sbom/bin/cyclonedx-py environment --output-reproducible -o /sbom.cdx.json /venv/bin/python

FROM worker-venv AS worker-sbom
COPY --from=sbom /sbom /sbom
RUN /sbom/bin/cyclonedx-py environment --output-reproducible -o /sbom.cdx.json /venv/bin/python

# --- The images -------------------------------------------------------------------------------------

# A service is process 1 of its container, and the kernel drops a SIGTERM that process 1 does not handle. `env` blocks the
# signal until the service has a handler, so that a container that is told to stop while it starts stops.

FROM frontend-venv AS frontend
COPY --from=frontend-sbom /sbom.cdx.json /
ENV ORCINUS_HTTP_ADDRESS=[::]:8000 ORCINUS_GRPC_ADDRESS=[::]:50051
EXPOSE 8000 50051
USER 65532:65532
ENTRYPOINT ["env", "--block-signal=TERM", "python", "-m", "services.frontend"]
ARG VERSION=0.1.0
ARG REVISION=
ARG CREATED=
LABEL org.opencontainers.image.title="orcinus/frontend" \
      org.opencontainers.image.description="OpenAI-compatible and gRPC front of an Orcinus pipeline" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.revision=$REVISION \
      org.opencontainers.image.created=$CREATED
COPY --from=frontend-code /app /app

FROM scheduler-venv AS scheduler
COPY --from=scheduler-sbom /sbom.cdx.json /
EXPOSE 50052
USER 65532:65532
ENTRYPOINT ["env", "--block-signal=TERM", "python", "-m", "services.scheduler"]
ARG VERSION=0.1.0
ARG REVISION=
ARG CREATED=
LABEL org.opencontainers.image.title="orcinus/scheduler" \
      org.opencontainers.image.description="Iteration-level scheduler of an Orcinus pipeline" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.revision=$REVISION \
      org.opencontainers.image.created=$CREATED
COPY --from=scheduler-code /app /app

FROM worker-venv AS worker
COPY --from=worker-sbom /sbom.cdx.json /
ARG DEVICE=cpu
ENV ORCINUS_DEVICE=$DEVICE
EXPOSE 50053
USER 65532:65532
ENTRYPOINT ["env", "--block-signal=TERM", "python", "-m", "services.worker"]
ARG VERSION=0.1.0
ARG REVISION=
ARG CREATED=
LABEL org.opencontainers.image.title="orcinus/worker" \
      org.opencontainers.image.description="One stage of an Orcinus pipeline, on $DEVICE" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.revision=$REVISION \
      org.opencontainers.image.created=$CREATED
COPY --from=worker-code /app /app

# An init container: its argument is the directory that gets the checkpoint.
FROM ${BASE} AS demo-model
COPY --from=model /model /model
USER 65532:65532
HEALTHCHECK NONE
ENTRYPOINT ["cp", "--recursive", "/model/."]
ARG VERSION=0.1.0
ARG REVISION=
ARG CREATED=
LABEL org.opencontainers.image.title="orcinus/demo-model" \
      org.opencontainers.image.description="A small checkpoint to try Orcinus with" \
      org.opencontainers.image.licenses="PSF-2.0" \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.revision=$REVISION \
      org.opencontainers.image.created=$CREATED
