"""Start the ranks of one machine or many: plan, meet, start, watch over one another, end together."""

from simpletuner.launch.environment import check_world_size, choose_gpus, is_rank
from simpletuner.launch.plan import describe_plans
from simpletuner.launch.supervisor import launch_ranks

__all__ = ["check_world_size", "choose_gpus", "describe_plans", "is_rank", "launch_ranks"]
