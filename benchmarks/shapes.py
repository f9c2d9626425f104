"""The shapes that are measured. quick: a few minutes; full: everything."""

import torch

DTYPES = {
    "quick": (torch.float32, torch.bfloat16),
    "full": (torch.float32, torch.bfloat16, torch.float16),
}

CONV = {
    "quick": [(8, 1536, 2048, 4)],
    "full": [(8, 1536, 2048, 4), (1, 1536, 2048, 4), (8, 1536, 2048, 3), (8, 1536, 2048, 8), (64, 768, 16, 4)],
}
# Equal work in rows of different length (report B106).
SMALL_LENGTHS = [(4096, 16), (512, 128), (64, 1024), (1, 65536)]

NORM = {"quick": [(4096, 768), (4096, 2048)], "full": [(4096, 768), (4096, 2048), (2048, 768), (65536, 64)]}

# batch, dim, dstate, seqlen; the first is the one that others are compared with
SCAN = {
    "quick": [(1, 1536, 16, 2048), (1, 1536, 16, 512)],
    "full": [(1, 1536, 16, seqlen) for seqlen in (2048, 512, 8192, 32768, 65536)]
    + [(1, 1536, dstate, 2048) for dstate in (1, 4, 64, 128)]
    + [(8, 1536, 16, 512), (1, 64, 16, 2048), (64, 1536, 16, 16), (4096, 64, 16, 16)],
}
SCAN_LONG = 2**29  # state steps: from here on float32 and one layout only
SCAN_MEMORY = (1, 1536, 16, 8192)

# d_model, batch, seqlen
LAYER = {"quick": [(768, 1, 512), (768, 1, 2048)], "full": [(768, 1, 512), (768, 1, 2048), (768, 8, 512)]}

THREADS = {
    "selective_scan": (1, 1536, 16, 2048),
    "causal_conv1d": (8, 1536, 2048, 4),
    "rms_norm": (4096, 2048),
    "rms_norm, gated": (4096, 768),
}

# batch, seqlen, channels
RECURRENCE = {
    "quick": [(8, 512, 256)],
    "full": [(8, 512, 256), (64, 1024, 256), (1, 65536, 256), (512, 64, 256), (8, 4096, 2048)],
}
GATED_SCAN = {"quick": [(8, 512, 256), (64, 4096, 256)], "full": [*RECURRENCE["full"], (64, 4096, 256)]}
RECURRENCE_WITH_PEERS = 8 * 512 * 256  # numbers: beyond that, theirs take minutes

BACKTEST = {"quick": [10_000_000], "full": [100_000, 10_000_000]}
