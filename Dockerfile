# Everything that runs inside a task, for GPUs (the default) or for CPUs:
#
#   make image                 TensorFlow with its CUDA libraries; of the host it needs the driver only
#   make image VARIANT=cpu     TensorFlow without them
#
# No syntax beyond what Docker's first builder knows, so that it builds where BuildKit is not to be had.

FROM python:3.11-slim AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1
WORKDIR /build
# pip stands beside the environment that it fills, so that nothing can be installed in the image later.
RUN python -m venv tools && python -m venv --without-pip /opt/trireme

# 1. What of Debian is in the image, for whoever has to know; told while this stage still has the last one's packages.
COPY requirements/image.txt tools.txt
RUN tools/bin/pip install --quiet --no-compile --require-hashes --no-deps -r tools.txt \
 && mkdir /opt/sbom \
 && tools/bin/debsbom generate -t cdx -o /opt/sbom/debian
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends binutils >/dev/null

# 2. The dependencies, which change seldom and are large, and the list of them. Headers and libclang serve compilers only,
#    the packages' own tests nobody here, and the symbol tables of TensorFlow and Arrow, a quarter of a gigabyte, only a
#    debugger. A few packages carry templates that are no Python, so what compileall says is not decisive.
ARG VARIANT=gpu
COPY requirements/${VARIANT}.txt locked.txt
RUN tools/bin/pip --python /opt/trireme/bin/python install --quiet --no-compile --require-hashes --no-deps -r locked.txt \
 && cd /opt/trireme/lib/python3*/site-packages \
 && rm -rf tensorflow/include pyarrow/include clang/native \
 && find . -type d -name tests -prune -exec rm -rf {} + \
 && find tensorflow pyarrow -type f -name '*.so*' -exec strip --strip-unneeded {} + \
 && echo /opt/rooms > rooms.pth \
 && { /opt/trireme/bin/python -m compileall -qq -j 0 --invalidation-mode unchecked-hash . || true; }
RUN tools/bin/cyclonedx-py environment --output-reproducible -o /opt/sbom/python.cdx.json /opt/trireme/bin/python

# 3. The three rooms: a stage of their own, so that a change of them leaves the large one what it was, and nothing of it is
#    looked at again.
FROM dependencies AS rooms
COPY pyproject.toml README.md LICENSE ./
COPY trainer trainer
COPY components components
COPY pipelines pipelines
RUN tools/bin/pip --python /opt/trireme/bin/python install --quiet --no-compile --no-deps --no-build-isolation \
      --target /opt/rooms . \
 && /opt/trireme/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/rooms


FROM python:3.11-slim
# Kubeflow's launcher puts artifacts into /gcs, /s3 and /minio, whoever the task runs as.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /work --shell /usr/sbin/nologin trireme \
 && install -d -m 1777 /work /gcs /s3 /minio
COPY --from=dependencies /opt/trireme /opt/trireme
COPY --from=dependencies /opt/sbom /opt/sbom
COPY image/entrypoint.sh /usr/local/bin/entrypoint
COPY --from=rooms /opt/rooms /opt/rooms
# A .pth file in the environment names /opt/rooms, so that PYTHONPATH stays free for a user's own models. HOME is the one
# place that is writable in every container: libraries put caches there, also when the root is read-only. The GPU runtime
# hands out GPUs on request only; what it adds to them is named here.
ENV PATH=/opt/trireme/bin:/opt/rooms/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /work
ENTRYPOINT ["entrypoint"]
CMD ["--help"]

ARG VARIANT=gpu
ARG VERSION=
ARG REVISION=
ARG CODE_DIGEST=
ENV TRIREME_REVISION=$REVISION
LABEL org.opencontainers.image.title="Trireme" \
      org.opencontainers.image.description="TensorFlow training on Kubeflow Pipelines ($VARIANT)" \
      org.opencontainers.image.source="https://github.com/trireme-ml/trireme" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      trireme.variant="$VARIANT" \
      trireme.code.digest="$CODE_DIGEST"
