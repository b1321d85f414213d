"""In what order each stage runs its forwards, backwards and updates. A schedule is data: checked, rendered, timed."""
