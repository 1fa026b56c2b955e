# syntax=docker/dockerfile:1
# Stages: prod (the package alone), bench (to measure), ci (the tests of a machine without a GPU),
# dev (an editable checkout). Kernels are compiled at run time by the ptxas of Triton's wheel, so no
# CUDA toolkit is needed; GPUs come from the host with `docker run --gpus all`.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1
# Triton compiles a small launcher with the C compiler of the system. Debian keeps one version of a
# package for a release, so a pinned one would stop building with the next security fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 bsk
# compiled kernels are code that is loaded: only this user may write there
ENV TRITON_CACHE_DIR=/home/bsk/.triton/cache

FROM base AS build
WORKDIR /src
RUN pip install build==1.3.0
COPY pyproject.toml long_description.py README.md CHANGELOG.md LICENSE ./
COPY src ./src
RUN python -m build --wheel --outdir /wheels

FROM base AS prod
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install /wheels/*.whl
USER 1000
WORKDIR /home/bsk
ENTRYPOINT ["bsk"]
CMD ["info"]

FROM prod AS bench
USER 0
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install "$(ls /wheels/*.whl)[cli]"
USER 1000
VOLUME ["/home/bsk/bsk-results"]
CMD ["bench", "founding"]

FROM base AS ci
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends chromium git make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN chown bsk /src
USER 1000
COPY --chown=1000 . .
CMD ["make", "test-all"]

FROM ci AS dev
RUN make .venv/.installed-test
ENV PATH=/src/.venv/bin:${PATH}
CMD ["bash"]
