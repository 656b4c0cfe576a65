"""The `rookery` command: runs the services as processes and shows how they are."""
