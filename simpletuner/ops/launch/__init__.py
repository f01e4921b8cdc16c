"""Start the ranks of one machine or many: plan, meet, start, watch over one another, end together."""

from simpletuner.ops.launch.environment import check_world_size, choose_gpus, is_rank
from simpletuner.ops.launch.launching import launch_ranks
from simpletuner.ops.launch.plan import describe_plans

__all__ = ["check_world_size", "choose_gpus", "describe_plans", "is_rank", "launch_ranks"]
