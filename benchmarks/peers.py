"""Other implementations of the same operators. A package that is not installed is skipped, in words."""

import importlib

import torch
import torch.nn.functional as F


def optional(module, missing):
    """The module, or None and a line in `missing`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing.append(f"{module.split('.')[0]} is not installed or does not import ({error}): left out")
        return None


def compiled(function):
    return torch.compile(function, dynamic=False)


# ---- selective scan: u, delta, A, B (batch, dstate, seqlen), C, D, z, delta_bias -> out ----


def time_loop(u, delta, A, B, C, D, z, delta_bias):
    """The slow path of common model libraries: everything discretised at once, then a loop over time."""
    delta = F.softplus(delta + delta_bias[:, None])
    decay = torch.exp(delta.unsqueeze(-1) * A[:, None])
    drive = delta.unsqueeze(-1) * B.transpose(1, 2).unsqueeze(1) * u.unsqueeze(-1)
    state, outputs = u.new_zeros(u.shape[0], u.shape[1], A.shape[1]), []
    for t in range(u.shape[2]):
        state = decay[:, :, t] * state + drive[:, :, t]
        outputs.append(torch.matmul(state, C[:, :, t].unsqueeze(-1))[:, :, 0])
    return (torch.stack(outputs, dim=-1) + u * D[:, None]) * F.silu(z)


CHUNK = 8


def _eight_steps(state, u, delta, A, B, C):
    outputs = []
    for t in range(u.shape[2]):
        step = delta[:, :, t, None]
        state = torch.exp(step * A) * state + (step * u[:, :, t, None]) * B[:, None, :, t]
        outputs.append((state * C[:, None, :, t]).sum(-1))
    return state, torch.stack(outputs, dim=-1)


_eight_steps_compiled = compiled(_eight_steps)


def chunks_compiled(u, delta, A, B, C, D, z, delta_bias):
    """Eight steps unrolled into one compiled graph, called seqlen / 8 times."""
    delta = F.softplus(delta + delta_bias[:, None])
    state, outputs = u.new_zeros(u.shape[0], u.shape[1], A.shape[1]), []
    for t in range(0, u.shape[2], CHUNK):
        piece = slice(t, t + CHUNK)
        state, y = _eight_steps_compiled(state, u[..., piece], delta[..., piece], A, B[..., piece], C[..., piece])
        outputs.append(y)
    return (torch.cat(outputs, dim=-1) + u * D[:, None]) * F.silu(z)


def scans(missing):
    """{name: function} of the scan's peers."""
    found = {"plain PyTorch time loop": time_loop, "torch.compile, 8-step chunks": chunks_compiled}
    mamba = optional("transformers.models.mamba.modeling_mamba", missing)
    if mamba is not None and hasattr(mamba, "mamba_selective_scan"):

        def transformers_scan(u, delta, A, B, C, D, z, delta_bias):
            out = mamba.mamba_selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus=True)
            return out[0] if isinstance(out, tuple) else out

        found["transformers"] = transformers_scan
    elif mamba is not None:
        missing.append("this version of transformers has no mamba_selective_scan: left out")
    pscan = optional("mambapy.pscan", missing)
    if pscan is not None:

        def mambapy_scan(u, delta, A, B, C, D, z, delta_bias):
            delta = F.softplus(delta + delta_bias[:, None]).transpose(1, 2)
            decay = torch.exp(delta.unsqueeze(-1) * A)
            drive = delta.unsqueeze(-1) * B.transpose(1, 2).unsqueeze(2) * u.transpose(1, 2).unsqueeze(-1)
            states = pscan.pscan(decay, drive)
            y = (states @ C.transpose(1, 2).unsqueeze(-1)).squeeze(3).transpose(1, 2)
            return (y + u * D[:, None]) * F.silu(z)

        found["mambapy"] = mambapy_scan
    return found


# ---- convolution: x, weight (dim, width), bias -> out ----


def conv1d(x, weight, bias):
    """F.conv1d and F.silu, as models without a fused operator call them."""
    width, seqlen = weight.shape[1], x.shape[2]
    return F.silu(F.conv1d(x, weight.unsqueeze(1), bias, padding=width - 1, groups=x.shape[1])[..., :seqlen])


def _shifted_adds(x, weight, bias):
    width, seqlen = weight.shape[1], x.shape[2]
    padded = F.pad(x, (width - 1, 0))
    total = bias[:, None]
    for k in range(width):
        total = total + weight[:, k, None] * padded[..., k : k + seqlen]
    return F.silu(total)


def convolutions():
    return {"F.conv1d": conv1d, "torch.compile, shifted adds": compiled(_shifted_adds)}


# ---- linear recurrence: x, gates, dim (the time axis) -> states ----


def recurrence_loop(x, gates, dim):
    """One step after the other."""
    return _recurrence_steps(x, gates, torch.zeros_like(x.select(dim, 0)), dim)[0]


def _recurrence_steps(x, gates, state, dim):
    states = []
    for x_t, gate in zip(x.unbind(dim), gates.unbind(dim)):
        state = gate * state + x_t
        states.append(state)
    return torch.stack(states, dim), state


_recurrence_steps_compiled = compiled(_recurrence_steps)


def recurrence_chunks_compiled(x, gates, dim):
    """Eight steps unrolled into one compiled graph, called seqlen / 8 times."""
    state, pieces = torch.zeros_like(x.select(dim, 0)), []
    for x_piece, gate_piece in zip(x.split(CHUNK, dim), gates.split(CHUNK, dim)):
        piece, state = _recurrence_steps_compiled(x_piece, gate_piece, state, dim)
        pieces.append(piece)
    return torch.cat(pieces, dim)


def recurrence_doubling(x, gates, dim):
    """Parallel over time: log2(seqlen) rounds over the whole tensors."""
    x, gates, seqlen = x.movedim(dim, -1), gates.movedim(dim, -1), x.shape[dim]
    reach = 1
    while reach < seqlen:
        x = x + gates * F.pad(x[..., :-reach], (reach, 0))
        gates = gates * F.pad(gates[..., :-reach], (reach, 0), value=1.0)
        reach *= 2
    return x.movedim(-1, dim)


def recurrences():
    return {
        "plain PyTorch time loop": recurrence_loop,
        "torch.compile, 8-step chunks": recurrence_chunks_compiled,
        "doubling": recurrence_doubling,
        "doubling, torch.compile": compiled(recurrence_doubling),
    }


# ---- norm: x, weight -> out ----


def norms():
    def plain(x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)

    def by_hand(x, weight):
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))

    return {"F.rms_norm": plain, "by hand": by_hand, "by hand, torch.compile": compiled(by_hand)}


# ---- one layer ----


def mixers(layer, missing):
    """{name: module} of transformers' MambaMixer with the weights of `layer`, on its plain path and with mambapy."""
    mamba = optional("transformers.models.mamba.modeling_mamba", missing)
    if mamba is None:
        return {}
    found = {"transformers": False}
    if optional("mambapy.pscan", missing) is not None:
        found["transformers with mambapy"] = True
    for name, use_mambapy in found.items():
        config = mamba.MambaConfig(
            hidden_size=layer.d_model,
            state_size=layer.d_state,
            conv_kernel=layer.d_conv,
            expand=layer.expand,
            time_step_rank=layer.dt_rank,
            use_mambapy=use_mambapy,
        )
        found[name] = mamba.MambaMixer(config, layer_idx=0).train()
        found[name].load_state_dict(layer.state_dict())
    return found


# ---- whole models: decoding ----


def transformers_model(model, missing):
    """transformers' Mamba language model with the weights of `model` (a MambaLM), on its plain path; or None."""
    transformers = optional("transformers", missing)
    if transformers is None:
        return None
    config, mixer = model.config, model.backbone.layers[0].mixer
    theirs = transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=config.padded_vocab_size,
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layer,
            state_size=mixer.d_state,
            conv_kernel=mixer.d_conv,
            expand=mixer.expand,
            time_step_rank=mixer.dt_rank,
            layer_norm_epsilon=config.norm_epsilon,
            residual_in_fp32=config.residual_in_fp32,
            tie_word_embeddings=config.tie_embeddings,
        )
    ).to(model.backbone.embedding.weight.dtype)
    names = {name.replace("backbone.embedding.", "backbone.embeddings."): t for name, t in model.state_dict().items()}
    theirs.load_state_dict(names, strict=False)
    return theirs.eval()


def transformers_decoder(theirs, ids):
    """One more token for every row, from a warm cache, again and again."""
    cache = theirs(ids[:, :-1], use_cache=True).cache_params
    return lambda: theirs(ids[:, -1:], cache_params=cache, use_cache=True).logits[:, -1]
