# A target with vLLM's engine: vLLM's own image, with what it lacks. `make image IMAGES=vllm` gathers the wheels first.
ARG BASE=docker.io/vllm/vllm-openai:v0.32.0

# What vLLM's image has stays as it is: only wheels are at hand, and packages that do are not replaced.
FROM ${BASE}
COPY build/image/vllm /wheels
RUN PYTHONPATH=$(echo /wheels/pip-*.whl) python3 -m pip install -q --no-index --find-links /wheels --no-compile 'slipstream-vllm[target]' && \
    echo 'slipstream:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd && mkdir /models && chown 65532:65532 /models
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
ENV GRPC_EXPERIMENTS=-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints
WORKDIR /tmp
USER 65532:65532
ENTRYPOINT ["python3", "-m", "slipstream"]
