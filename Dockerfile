# docker build -t simpletuner . && docker run --gpus all --shm-size=16g -v "$PWD:/workspace" simpletuner train --config photos.toml
# CUDA 13.0 is what PyPI's wheels of torch 2.13 bring. They need the driver alone: `devel` is for nvcc, with which DeepSpeed
# compiles its optimizers, and gcc for torch.compile.
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ libaio-dev openssh-client python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/simpletuner
COPY constraints.txt ./
# Layers of their own: a change of simpletuner alone uploads and downloads a megabyte, not the gigabytes of torch.
RUN python3 -m venv /opt/venv && pip install --no-cache-dir -c constraints.txt torch
COPY pyproject.toml README.md ./
RUN mkdir simpletuner && echo '__version__ = "0"' > simpletuner/__init__.py && pip install --no-cache-dir -c constraints.txt '.[deepspeed,heif,kernels,page,s3,tensorboard,torchao,video,wandb]'
COPY simpletuner simpletuner
RUN pip install --no-cache-dir --no-deps --force-reinstall . && simpletuner --version
WORKDIR /workspace
ENTRYPOINT ["simpletuner"]
