"""TensorRT-LLM 1.2.1 in the ranks of a job, with the same protocol as the native engine.

It has never been run: it was written from that version's published documentation and from sources near it. The pure
part (arguments, sampling, conversion, names, order of calls) is tested against stand-ins, which do not show how the
package behaves. `tools/gpu_check.sh` lists what to try first on a machine with GPUs.
"""
