"""Dataset files of the original, of sd-scripts and of diffusion-pipe as entries of ours."""
