//! What an entry of the table of refusal codes has, and the code that is made of all of them.

use super::Code;

/// Whether a client may send the refused request again as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repeat {
    /// The same request is refused again until the client changes the request, the session or the
    /// setup.
    AfterChange,
    /// No part of the request has run, and the same request may succeed after this many seconds.
    /// The answer has the header `Retry-After`.
    AfterSeconds(u64),
    /// A part of the request may have run. The client must look before it repeats the request.
    AfterCheck,
}

/// The process that makes a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Only the router.
    Router,
    /// Only the agent. The router passes the agent's refusal on.
    Agent,
    /// Router and agent.
    Both,
}

/// A section of the guide's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// The heading.
    pub title: &'static str,
    /// The codes, in the order of the table.
    pub codes: &'static [Code],
}

/// Defines [`Code`] and its methods, and [`GROUPS`]. An entry has: variant, name, status, origin,
/// [`Repeat`], what happened, what the client should do.
macro_rules! codes {
    ($($title:literal {
        $($code:ident $name:literal $status:ident $origin:ident $repeat:expr,
            $meaning:literal, $action:literal;)*
    })*) => {
        /// The stable name of a reason for which Berth refuses a request.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Code {
            $($(#[doc = $meaning] $code,)*)*
        }

        /// All codes, by section of the guide.
        pub const GROUPS: &[Group] = &[
            $(Group { title: $title, codes: &[$(Code::$code),*] },)*
        ];

        impl Code {
            /// Returns the code as clients see it, in `snake_case`.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $($(Self::$code => $name,)*)* }
            }

            /// Returns the HTTP status of every refusal with this code.
            #[must_use]
            pub const fn status(self) -> StatusCode {
                match self { $($(Self::$code => StatusCode::$status,)*)* }
            }

            /// Returns the process that makes such refusals.
            #[must_use]
            pub const fn origin(self) -> Origin {
                match self { $($(Self::$code => Origin::$origin,)*)* }
            }

            /// Returns whether the same request may be sent again.
            #[must_use]
            pub const fn repeat(self) -> Repeat {
                match self { $($(Self::$code => $repeat,)*)* }
            }

            /// Returns what happened, for the guide.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $($(Self::$code => $meaning,)*)* }
            }

            /// Returns what the client should do, for the guide.
            #[must_use]
            pub const fn action(self) -> &'static str {
                match self { $($(Self::$code => $action,)*)* }
            }
        }
    };
}
