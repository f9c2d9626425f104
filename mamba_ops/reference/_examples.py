"""What the modules' `example_inputs` share."""

import torch


def normal_numbers(dtype, device, generator):
    """normal(*shape): standard normal numbers times `scale`, drawn in float64 on the CPU for every dtype and device."""
    device = device or torch.get_default_device()

    def normal(*shape, scale=1.0, dtype=dtype):
        values = torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu").mul_(scale)
        return values.to(device=device, dtype=dtype)

    return normal


def borders(packing, batch, seqlen, device):
    """(arguments, batch, number of sequences): of three segments a row, of four sequences with a padded tail, or none.

    packing is None, "seq_idx" or "cu_seqlens" (one of the sequences is empty).
    """
    if packing is None:
        return {}, batch, batch
    if packing == "seq_idx":
        ids = torch.arange(seqlen) * 3 // max(seqlen, 1) + torch.arange(batch)[:, None]
        return {"seq_idx": ids.to(device=device or torch.get_default_device(), dtype=torch.int32)}, batch, batch
    if packing == "cu_seqlens":
        ends = [0, seqlen // 4, seqlen // 4, seqlen // 2, seqlen - seqlen // 5]
        return {"cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=device)}, 1, 4
    raise ValueError(f"packing must be None, 'seq_idx' or 'cu_seqlens', got {packing!r}")
