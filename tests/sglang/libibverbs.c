/*
 * Replaces the InfiniBand library on a machine that has none.
 *
 * Mooncake's engine is linked against libibverbs.so.1 and can't be loaded without these functions,
 * although it calls none of them when it sends over TCP. A machine without devices answers like
 * this: a null pointer is no device and no list of devices.
 */

#define NO_DEVICE(name) void *name(void) { return 0; }

NO_DEVICE(_ibv_query_gid_ex)
NO_DEVICE(ibv_ack_async_event)
NO_DEVICE(ibv_ack_cq_events)
NO_DEVICE(ibv_alloc_pd)
NO_DEVICE(ibv_close_device)
NO_DEVICE(ibv_create_comp_channel)
NO_DEVICE(ibv_create_cq)
NO_DEVICE(ibv_create_qp)
NO_DEVICE(ibv_dealloc_pd)
NO_DEVICE(ibv_dereg_mr)
NO_DEVICE(ibv_destroy_comp_channel)
NO_DEVICE(ibv_destroy_cq)
NO_DEVICE(ibv_destroy_qp)
NO_DEVICE(ibv_event_type_str)
NO_DEVICE(ibv_fork_init)
NO_DEVICE(ibv_free_device_list)
NO_DEVICE(ibv_get_async_event)
NO_DEVICE(ibv_get_cq_event)
NO_DEVICE(ibv_get_device_list)
NO_DEVICE(ibv_get_device_name)
NO_DEVICE(ibv_modify_qp)
NO_DEVICE(ibv_open_device)
NO_DEVICE(ibv_query_device)
NO_DEVICE(ibv_query_gid)
NO_DEVICE(ibv_query_port)
NO_DEVICE(ibv_query_qp)
NO_DEVICE(ibv_reg_mr)
NO_DEVICE(ibv_reg_mr_iova2)
NO_DEVICE(ibv_wc_status_str)
