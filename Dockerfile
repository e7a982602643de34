# Gateway, native engine, arena and the default model in one image, which needs no network to run.
#
#   docker build --tag goodgate .
#   docker run --rm --publish 127.0.0.1:8080:8080 --read-only --tmpfs /tmp --volume goodgate:/data goodgate
#
# Versions come from constraints.txt. To fix the base as well, name it by digest:
#   --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:... (docker buildx imagetools inspect shows it)
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS builder
# Python's own index has torch for CUDA only, some GB; "cu130" in the place of "cpu" gives that on purpose.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG SOURCE_DATE_EPOCH=1767225600
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
COPY constraints.txt ./
RUN python -m venv /opt/goodgate \
 && /opt/goodgate/bin/pip install --no-compile --no-deps --constraint constraints.txt --index-url "${TORCH_INDEX}" torch \
 && pip install --constraint constraints.txt setuptools
COPY pyproject.toml README.md goodgate.py ./
COPY gateway gateway
COPY adapters adapters
COPY native_engine native_engine
COPY arena arena
COPY configs configs
RUN SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH}" pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/goodgate/bin/pip install --no-compile --constraint constraints.txt "$(echo /wheels/goodgate-*.whl)[native,arena,redis]"
# Bytecode by hash, not by time: the same in every build, and a read-only root cannot make it later. One of torch's own
# test files is written for a newer Python.
RUN python -m compileall -q -j 0 --invalidation-mode unchecked-hash -x '/torch/testing/' /opt/goodgate/lib
RUN GOODGATE_HOME=/data /opt/goodgate/bin/goodgate models pull smollm2-135m-instruct

FROM ${PYTHON_IMAGE}
# The native engine compiles its C kernels for the very processor that it runs on, which is not the builder's: without
# a compiler it would be many times slower. gcc is here for that alone.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --no-log-init --create-home --uid 1000 goodgate
COPY --from=builder /opt/goodgate /opt/goodgate
COPY --from=builder --chown=1000:1000 /data /data
WORKDIR /goodgate
COPY configs configs
ENV PATH=/opt/goodgate/bin:$PATH \
    GOODGATE_HOME=/data \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="goodgate" \
      org.opencontainers.image.description="One OpenAI-compatible endpoint in front of many inference engines, and an arena that ranks them on goodput." \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 1000:1000
VOLUME /data
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
# 0.0.0.0 is the container's own network: who may reach it is decided where the port is published. Hence --open, which
# holds until the first `goodgate keys create` in the volume.
CMD ["goodgate", "serve", "--host", "0.0.0.0", "--open", "--config", "configs/local.yaml"]
