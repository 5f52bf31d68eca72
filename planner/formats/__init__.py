"""Define the published JSON formats: Profile, Policy, PolicySet and Constraints."""
