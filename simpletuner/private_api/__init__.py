"""Private API of torch and diffusers that nothing public replaces, one module per library."""
