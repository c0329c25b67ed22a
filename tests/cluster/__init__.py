"""Tests on a real Kubernetes cluster: `make test-cluster` with KUBECONFIG set."""
