"""`config import`: files of the original and of other trainers become settings, and what is left out is said."""
