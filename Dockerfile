# docker build -t offload-trainer .                                            cards from Turing on
# docker build -t offload-trainer --build-arg CARD=volta .                     Volta and Pascal
# docker build -t offload-trainer --build-arg CARD=cpu .                       no card
# docker build -t offload-trainer --build-arg EXTRAS=deepspeed,tensorboard .   with DeepSpeed and a compiler
# BASE is an image with apt-get, Python 3.11 or newer and pip; a torch that it has already is kept.
# docker run --gpus all --ipc host -v /mnt/ssd:/mnt/ssd -v $PWD/runs:/runs offload-trainer --nvme /mnt/ssd --output /runs/first
ARG BASE=python:3.12-slim
FROM $BASE AS release
RUN apt-get update -q && apt-get install -y -q --no-install-recommends g++ && pip install --no-cache-dir 'setuptools>=77'
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY scripts/build_release.py scripts/
COPY offload_trainer offload_trainer
RUN python scripts/build_release.py /release

FROM $BASE
ARG CARD=turing
RUN case "$CARD" in \
    turing) pip install --no-cache-dir torch ;; \
    volta) pip install --no-cache-dir 'torch<2.15' --index-url https://download.pytorch.org/whl/cu126 ;; \
    cpu) pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu ;; \
    *) echo "CARD=$CARD: volta (and Pascal), turing (and later), or cpu" >&2; exit 2 ;; \
    esac
ARG EXTRAS=tensorboard,hf
# Triton compiles its launcher at the first run, and DeepSpeed its kernels, with g++ and libaio's header.
RUN case "$CARD,$EXTRAS," in turing,*|volta,*|*,deepspeed,*|*,adamw8bit,*|*,all,*) \
    apt-get update -q && apt-get install -y -q --no-install-recommends g++ libaio-dev && rm -rf /var/lib/apt/lists/* ;; \
    esac
RUN --mount=type=bind,from=release,source=/release,target=/release \
    pip install --no-cache-dir "$(ls /release/*.whl)[$EXTRAS]"
ENV OFFLOAD_TRAINER_CACHE=/runs/.cache
ENTRYPOINT ["offload-train"]
