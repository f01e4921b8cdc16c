"""The editor of a config file, and the dialogs that fill its fields.

editor.py          one config file: show, check what is typed, save in place
documents.py       a config file with what was typed over it
examination.py     what the settings layer says of it: origins, mistakes, warnings
fields.py          fields of the form, made of the declarations of settings
views.py           which of them are shown together: the essentials, what is set, all
hardware.py        Hardware -> Accelerate: labels, and what cannot be had
planning.py        `simpletuner plan` for what is typed: one process at a time, and the answers so far
plan_panel.py      the plan beside the form
blocks.py          the Detect Blocks dialog; a separate process builds the model
builder_dialog.py  the DeepSpeed Builder dialog
"""
