# docker build -t offload-trainer .
# docker run --gpus all --ipc host -v /mnt/ssd:/mnt/ssd -v $PWD/runs:/runs offload-trainer --nvme /mnt/ssd --output /runs/first
#
# g++ compiles the update's kernel on first use; torch from PyPI brings CUDA for cards from Turing on.
FROM python:3.12-slim
RUN apt-get update -q && apt-get install -y -q --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY offload_trainer offload_trainer
RUN pip install --no-cache-dir '.[tensorboard,gguf,hf]'
WORKDIR /
ENV OFFLOAD_TRAINER_CACHE=/runs/.cache
ENTRYPOINT ["offload-train"]
