"""What `deformops-models shapes`, `finetune` and `eval` run; nothing here is imported before one of them is called."""
