"""The names and values of the original SimpleTuner, as data, and what each becomes here."""
