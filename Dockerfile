# assay with the pinned packages, for NVIDIA GPUs or for CPUs. This file has never been built.
#
#     docker build -t assay .                                    # PyTorch for CUDA (x86-64), as the package index has it
#     docker build -t assay-cpu --build-arg TORCH_INDEX=URL .    # URL: PyTorch's package index of CPU builds
#     docker run --gpus all --shm-size 8g -v "$PWD:/work" assay train configs/demo.toml
#     docker run --gpus all -p 8000:8000 -e KEY -v "$PWD:/work" assay serve run:demo@best --host 0.0.0.0 --api-key-env KEY
#
# The CUDA libraries come with PyTorch; the host needs the NVIDIA driver and its container toolkit.
FROM python:3.11-slim

# A C compiler: for decoding on CPUs (kernels/cpu.c), and for Triton on GPUs. git: for the commit in environment.json.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/assay
COPY constraints.txt ./
ARG TORCH_INDEX=""
# First and by its pin alone, as in the Makefile; it changes more rarely than the rest.
RUN pip install -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# Extras of the image, e.g. --build-arg EXTRAS=serve,view,wandb,hub
ARG EXTRAS="serve,view"
RUN pip install -c constraints.txt ".[$EXTRAS]"

# Runs, data and the cache of the Hugging Face hub are in /work, which the user mounts.
ENV HF_HOME=/work/.cache/huggingface
WORKDIR /work
ENTRYPOINT ["assay"]
CMD ["--help"]
