# The gateway with its native engine and the default model inside: it starts without a network.
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 && rm -rf /var/lib/apt/lists/*
WORKDIR /goodgate
COPY constraints.txt pyproject.toml README.md ./
COPY goodgate.py ./
COPY gateway gateway
COPY adapters adapters
COPY native_engine native_engine
COPY arena arena
COPY configs configs
RUN pip install --no-cache-dir --constraint constraints.txt torch \
 && pip install --no-cache-dir --constraint constraints.txt --editable '.[native,arena]'
ENV GOODGATE_HOME=/data
RUN useradd --create-home --uid 1000 goodgate && mkdir /data && chown goodgate /data
USER goodgate
RUN goodgate models pull smollm2-135m-instruct
EXPOSE 8080
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=2)"]
CMD ["goodgate", "serve", "--config", "configs/compose.yaml"]
