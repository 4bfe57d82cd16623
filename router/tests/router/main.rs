//! The router over real sockets, in front of agents that are as small as the contract allows.

#[cfg(test)]
mod agent;
mod blocks;
#[cfg(test)]
mod harness;
#[cfg(test)]
mod lifecycle;
#[cfg(test)]
mod preamble;
#[cfg(test)]
mod turns;
