"""The tensors and sizes of Mamba-2, in several architectures."""

from moeserve.loader.gguf_layers import depthwise, flat

SIZES = ("ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size")
HEADS = "ssm.time_step_rank"  # number of heads
NAMES = {
    "ssm_conv1d": "mamba.conv1d",
    "ssm_in": "mamba.in_proj",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
EXACT_NAMES = {"ssm_a": "mamba.A", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
SHAPES = {"ssm_a": flat, "ssm_conv1d": depthwise, "ssm_d": flat, "ssm_norm": flat}
