# The gateway. With `serve` alone it calls endpoints and embeds with "pixels" or "words"; `local` adds
# torch for the embedder "dual" and the bundled models, `photos` the embedders of photographs, `ui` the
# console.
FROM python:3.11.14-slim-bookworm AS built
ARG EXTRAS=serve
# PyPI's torch includes CUDA; PyTorch's index of CPU builds has one without. Do not put a password into
# this URL: build arguments stay in the history of this stage.
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN python -m venv /venv && /venv/bin/pip install -c constraints.txt ".[${EXTRAS}]"

FROM python:3.11.14-slim-bookworm
# Everything is written to /data, including downloaded models.
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp BOTTEGA_DATA=/data XDG_CACHE_HOME=/data/cache HF_HOME=/data/huggingface
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp bottega \
    && install --directory --mode 700 --owner bottega --group bottega /data
COPY --from=built /venv /venv
USER 10001:10001
WORKDIR /etc/bottega
VOLUME /data
EXPOSE 8000
# The process is alive. Load balancers use /readyz to learn whether it accepts requests.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]
ENTRYPOINT ["bottega"]
CMD ["serve", "--config", "/etc/bottega/bottega.toml", "--host", "0.0.0.0", "--port", "8000", "--log-format", "json"]
