# docker build -t offload-trainer .                                            cards from Turing on
# docker build -t offload-trainer --build-arg CARD=volta .                     Volta and Pascal
# docker build -t offload-trainer --build-arg CARD=cpu .                       no card
# docker build -t offload-trainer --build-arg EXTRAS=deepspeed,tensorboard .   with DeepSpeed
# BASE is an image with apt-get, Python 3.11 or newer and pip; a torch that it has already is kept.
# docker run --gpus all --ipc host -v /mnt/ssd:/mnt/ssd -v $PWD/runs:/runs offload-trainer --nvme /mnt/ssd --output /runs/first
ARG BASE=python:3.12-slim
FROM $BASE
# The update kernel, Triton's launcher and DeepSpeed's kernels are compiled at first use, with g++ and libaio's header.
RUN apt-get update -q && apt-get install -y -q --no-install-recommends g++ libaio-dev && rm -rf /var/lib/apt/lists/*
ARG CARD=turing
RUN case "$CARD" in \
    turing) pip install --no-cache-dir torch ;; \
    volta) pip install --no-cache-dir 'torch<2.15' --index-url https://download.pytorch.org/whl/cu126 ;; \
    cpu) pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu ;; \
    *) echo "CARD=$CARD: volta (and Pascal), turing (and later), or cpu" >&2; exit 2 ;; \
    esac
ARG EXTRAS=tensorboard,hf
COPY pyproject.toml README.md LICENSE /src/
COPY offload_trainer /src/offload_trainer
RUN pip install --no-cache-dir "/src[$EXTRAS]"
ENV OFFLOAD_TRAINER_CACHE=/runs/.cache
ENTRYPOINT ["offload-train"]
