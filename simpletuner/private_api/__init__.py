"""Private API of torch, diffusers and peft that nothing public replaces, one module per library."""
