"""`config import`: files of the original and of other trainers."""
