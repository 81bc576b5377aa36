# syntax=docker/dockerfile:1
# Penstock with the CPU build of torch, or with the CUDA build:
#   docker build -t penstock .
#   docker build -t penstock:cuda --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 --build-arg TORCH=cu128 .
#   docker run --rm penstock                          # greets; --gpus all for the CUDA image
#   docker run --rm -v "$PWD/runs:/work/runs" penstock train vit-digits
# torch.compile needs a C++ compiler on a CPU, and a C compiler for Triton's launchers on a GPU.

ARG BASE=debian:trixie-slim
FROM ${BASE}

ARG TORCH=cpu
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH

# First torch, which changes rarely and is by far the largest.
COPY constraints.txt /src/
# Its index has few versions of what torch needs; a build of torch with a suffix, which it alone has, goes before others.
RUN pip install --constraint /src/constraints.txt --index-url "https://download.pytorch.org/whl/${TORCH}" \
      --extra-index-url https://pypi.org/simple torch

COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --constraint /src/constraints.txt "/src[images,hf]"

# Ubuntu's images have a user of this number already.
RUN useradd --create-home --non-unique --uid 1000 penstock && mkdir /work && chown penstock /work
USER penstock
WORKDIR /work
ENTRYPOINT ["penstock"]
