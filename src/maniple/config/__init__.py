"""Job files: their schema (`schema`), how they are read (`load`), checked (`check`, `layout`) and shown (`show`)."""
