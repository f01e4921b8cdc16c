"""Private API of torch, diffusers, peft and pydantic that nothing public replaces, one module per library."""
