"""The loop that joins the scheduler and the runner."""
