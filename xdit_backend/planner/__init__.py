"""What a run will take: seconds and memory a rank for any layout, from the model, the job and the machine.
Pure arithmetic."""
