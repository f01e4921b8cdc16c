"""`deepspeed build`: by flags, or by questions in a terminal."""
