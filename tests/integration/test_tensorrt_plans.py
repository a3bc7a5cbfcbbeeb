"""Real plans of small models, compiled by TensorRT-RTX on a machine without a GPU. They are not executed."""


from random_models import save_random_llama  # noqa: F401
