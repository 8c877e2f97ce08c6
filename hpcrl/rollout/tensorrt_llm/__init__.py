"""TensorRT-LLM 1.2.1 inside the ranks of a job, behind the same protocol as the native engine.

Nobody has run it yet: it was written from that version's published documentation and from sources near it. What is pure
here (arguments, sampling, conversion, names, order of calls) is tested against stand-ins, which proves nothing about
how the package behaves. `tools/gpu_check.sh` is the list of what to try first on a machine with GPUs.
"""
