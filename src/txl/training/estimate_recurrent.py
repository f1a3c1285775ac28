"""What the layers of a recurrent model hold while they train: the part of `txl.training.estimate` that is theirs.

Letters: B lanes of one micro-batch, T tokens, I_n features that enter layer n, H_n its units, K_n tokens that its
convolution reads, P_n its weights, f = 4 bytes, d = 1 if there is dropout, m = d, but 0 for locked dropout
(`dropout_copies`).
"""

from __future__ import annotations

from txl.config import ModelConfig, TrainConfig
from txl.config.kinds import kernel_sizes
from txl.training.estimate_layers import LayerCosts, dropout_copies


def recurrent_costs(model: ModelConfig, train: TrainConfig) -> LayerCosts:
    """Of all layers; their scratch is needed when the softmax's has been given back.

    - lstm, as PyTorch's on a CPU: f*B*T*5*H_n, the output and four gates; scratch f*(9*B*T*H + 2*P) of the widest;
    - qrnn: f*B*T*4*H_n, and the windows f*B*T*K_n*I_n where K_n > 1; scratch f*(4*B*T*H + P) of the widest;
    - between layers f*B*T*(d + m)*H_n, and with dropped weights 2*f of those.
    """
    hidden, last = model.d_hidden or model.d_model, model.d_last or model.d_model
    widths = [model.d_model, *[hidden] * (model.n_layer - 1), last]
    tokens = train.batch_size // train.micro_batches * train.segment
    kept, state, weights = 0, 0, []
    for n_in, n_unit, size in zip(widths, widths[1:], kernel_sizes(model), strict=False):
        if model.kind == "lstm":
            weights.append(4 * n_unit * (n_in + n_unit))
            kept += tokens * 5 * n_unit + (2 * 4 * n_unit * n_unit if model.weight_drop > 0 else 0)
            state += 2 * n_unit
        else:
            weights.append(3 * n_unit * size * n_in)
            kept += tokens * (4 * n_unit + (size * n_in if size > 1 else 0))
            kept += 2 * weights[-1] if model.weight_drop > 0 else 0
            state += n_unit + (size - 1) * n_in
    kept += tokens * sum(dropout_copies(model, None)) * sum(widths[1:-1])
    per_token, per_weight = (9, 2) if model.kind == "lstm" else (4, 1)
    scratch = per_token * tokens * max(widths[1:]) + per_weight * max(weights)
    return LayerCosts(4 * kept, 4 * scratch, 2 * 4 * train.batch_size * state)
