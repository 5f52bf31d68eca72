"""Write logs and count metrics."""
