#!/usr/bin/env bash
# A model of diffusers that leaves autocast for a moment cannot be counted on the meta device: torch refuses the context.
#
# Models leave autocast where positions need float32, by torch.autocast(x.device.type, enabled=False). On the meta device, which
# FLOP counters and planners use since it takes no memory, that raises "unsupported scalarType", although it would do nothing:
# torch asks for the device's dtype of autocast before it looks whether autocast is on. Of diffusers 0.42 this holds for
# Ideogram 4; FLUX.1, which never leaves autocast, is counted.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy diffusers==0.42.1 transformers==5.23.0
cat > "$folder/count.py" <<'PY'
import diffusers
import torch
from torch.utils.flop_counter import FlopCounterMode

print(f"torch {torch.__version__}, diffusers {diffusers.__version__}")


def count(model, **given):
    with FlopCounterMode(display=False) as counter:
        model(**given, return_dict=False)
    return counter.get_total_flops()


with torch.device("meta"):
    ideogram = diffusers.Ideogram4Transformer2DModel(
        in_channels=16, num_layers=1, num_attention_heads=2, attention_head_dim=16, intermediate_size=32, adaln_dim=8,
        llm_features_dim=32, mrope_section=(3, 3, 2),
    )
    flux = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
    )
    ids = torch.ones(1, 8, dtype=torch.long)
    text, image, time = torch.empty(1, 8, 32), torch.empty(1, 8, 16), torch.empty(1)
    found = count(
        flux, hidden_states=image, encoder_hidden_states=text, pooled_projections=torch.empty(1, 32), timestep=time,
        img_ids=torch.empty(8, 3), txt_ids=torch.empty(8, 3),
    )
    print(f"FLUX.1 on the meta device: {found:,} FLOPs")
    try:
        count(
            ideogram, hidden_states=image, timestep=time, encoder_hidden_states=text, segment_ids=ids, indicator=ids,
            position_ids=torch.ones(1, 8, 3, dtype=torch.long),
        )
    except RuntimeError as error:
        print(f"Ideogram 4 on the meta device: {error}")
    else:
        raise AssertionError("Ideogram 4 runs on the meta device now")
try:
    torch.autocast("meta", enabled=False)
except RuntimeError as error:
    print(f"torch.autocast('meta', enabled=False): {error}")
else:
    raise AssertionError("autocast can be left on the meta device now")
with torch.autocast("cpu", enabled=False):
    print("torch.autocast('cpu', enabled=False): nothing happens, as it should")
PY
"$folder/venv/bin/python" "$folder/count.py" 2>/dev/null
