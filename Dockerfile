# verl-ext on an image of verl, which brings CUDA, torch, flash-attn and vLLM; nothing of them is changed.
#
#   docker build -t verl-ext .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/work" verl-ext verl-ext env
#
# verl 0.9.1 needs an image with torch 2.11 and transformers from 5.5.3 on: docs/start/install.md has the versions that were
# tried together. No image was at hand yet, so the build ends with what the image lacks, if anything.
ARG IMAGE=verlai/verl:vllm024.dev2
FROM ${IMAGE}
COPY . /opt/verl-ext
RUN pip install --no-cache-dir --no-deps verl==0.9.1 /opt/verl-ext \
    && ! pip check | grep '^verl-ext '
WORKDIR /work
