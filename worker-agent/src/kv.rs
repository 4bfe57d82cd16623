//! What the engine's cache holds, by its own events. Pure so far: messages are decoded ([`frame`]),
//! put in order ([`order`]), checked against their tokens ([`verify`]), and told as
//! routing blocks ([`pages`]).

pub mod frame;
mod msgpack;
pub mod order;
pub mod pages;
pub mod verify;
