"""Models on disk: config.json and model.safetensors in one directory."""

import json
from pathlib import Path

import torch
from torch import nn

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


def _safetensors():
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "saving and loading models needs the package safetensors: pip install 'mamba_ops[models]'"
        ) from error
    return safetensors.torch


def save_model(model: nn.Module, directory: str | Path) -> None:
    """Writes model.config and the parameters; a tensor with several names (tied weights) is stored under the first."""
    library = _safetensors()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().contiguous()
    library.save_file(tensors, directory / WEIGHTS_NAME, metadata={"format": "pt"})
    (directory / CONFIG_NAME).write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")


def load_model(model_class, config_class, directory: str | Path, device=None, dtype=None):
    """Builds model_class(config_class.from_dict(config.json)) and fills it; missing or unknown names are an error."""
    library = _safetensors()
    directory = Path(directory)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} holds no model: {name} is missing")
    config = config_class.from_dict(json.loads((directory / CONFIG_NAME).read_text()))
    tensors = library.load_file(directory / WEIGHTS_NAME)
    if dtype is None:
        dtype = tensors["backbone.embedding.weight"].dtype
    model = model_class(config, device="meta", dtype=dtype)
    model.to_empty(device=torch.get_default_device() if device is None else device)
    model.load_state_dict(tensors)
    return model.eval()
