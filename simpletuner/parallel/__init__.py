"""Process groups, the mesh of ranks, sharding, and the engines that torch itself provides."""
