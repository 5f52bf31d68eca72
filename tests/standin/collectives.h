#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

// Return a group for the device's tensors that exchanges copies of them over `gloo`.
c10::intrusive_ptr<c10d::Backend> host_memory_group(c10::intrusive_ptr<c10d::Backend> gloo);

// Run work of the host that belongs to the current stream, and record it if the stream is captured.
void run_or_record(c10::Device device, std::function<void()> work);
