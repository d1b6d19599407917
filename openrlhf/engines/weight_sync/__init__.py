"""Weights from the DeepSpeed actor into the vLLM engines, over vLLM's weight-transfer API.

``source`` walks the (possibly ZeRO-partitioned) parameters; ``gloo`` is a transport for machines without
GPUs, registered with vLLM beside its own ``ipc`` and ``nccl`` transports; ``sender`` drives one of the three.
"""
